"""`make demo`: Rota's main job, live: a fleet is scaled, rolled and hurt under load, and what that cost is told."""
