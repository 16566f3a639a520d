"""One reconcile of a group: observe, plan, write the assignment, annotate its pods, publish its status.

May know all packages below it. Every decision is made by `rota.planner`.
"""
