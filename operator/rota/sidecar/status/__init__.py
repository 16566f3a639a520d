"""What the sidecar says of itself: reports, probes, metrics, and the problems that a user must solve.

May know `member`; knows neither brokers nor the app.
"""
