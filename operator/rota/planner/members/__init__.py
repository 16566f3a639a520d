"""Members as the planner sees them: which pods count, and which process of a pod owns queues."""
