"""Status of the sidecar: reports, probes, metrics, and the problems that a user must solve.

May use `member`; knows neither brokers nor the app.
"""
