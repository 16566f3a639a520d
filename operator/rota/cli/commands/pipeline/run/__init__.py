"""`rota pipeline run`: all steps in one Spark application, with one summary and metrics."""
