"""Broker port and its adapters: `port.py` defines the interface; RocketMQ and an in-memory cluster implement it.

May import the core. Does not depend on Kubernetes or the pod.
"""
