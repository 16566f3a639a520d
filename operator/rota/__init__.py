"""Rota: a Kubernetes operator that assigns message queues to the pods of a consumer group."""
