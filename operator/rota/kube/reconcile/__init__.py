"""Work queue and reconcile of groups: observe, plan, write, annotate pods, publish the status.

May import all packages below it. Every decision is made by `rota.planner`.
"""
