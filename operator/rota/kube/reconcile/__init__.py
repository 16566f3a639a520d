"""Which groups are reconciled when, and one reconcile: observe, plan, write, annotate pods, publish the status.

May know all packages below it. Every decision is made by `rota.planner`.
"""
