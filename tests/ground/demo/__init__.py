"""`make demo`: Rota's main job, live: a fleet is scaled, rolled and hurt under load, and the cost is printed."""
