"""The only room that knows kopf and Kubernetes: it gathers, lets the planner decide, and applies."""
