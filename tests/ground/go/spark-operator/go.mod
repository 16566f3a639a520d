// The Spark operator's CRDs, by which a test validates docs/examples/pipeline/spark-application.yaml.
module rota.dev/ground/spark-operator

go 1.24.0

require github.com/kubeflow/spark-operator/v2 v2.3.0
