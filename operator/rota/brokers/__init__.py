"""Brokers behind one port: `port.py` says what an adapter must do; RocketMQ and a twin in memory are the adapters.

May know the core. Knows neither Kubernetes nor the pod.
"""
