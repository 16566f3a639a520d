"""Members as the planner sees them: who counts, and which process of a pod owns queues."""
