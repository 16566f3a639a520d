"""Rota: one brain for fleets of message-queue consumers on Kubernetes."""
