#!/bin/sh
# What the pipeline's image runs: `rota pipeline …`, or, where Spark itself starts it in a cluster, a driver or an executor.
set -eu
home=$(/opt/rota/bin/python -c 'import os, pyspark; print(os.path.dirname(pyspark.__file__))')
export SPARK_HOME="$home" PYSPARK_PYTHON=/opt/rota/bin/python PYSPARK_DRIVER_PYTHON=/opt/rota/bin/python

case "${1:-}" in
  driver)
    shift
    exec "$home/bin/spark-submit" --conf "spark.driver.bindAddress=$SPARK_DRIVER_BIND_ADDRESS" --deploy-mode client "$@"
    ;;
  executor)
    shift
    # Its options come one by one, as SPARK_JAVA_OPT_0, SPARK_JAVA_OPT_1, …
    number=0
    while eval "option=\${SPARK_JAVA_OPT_$number-}" && [ -n "$option" ]; do
      set -- "$@" "$option"
      number=$((number + 1))
    done
    exec java "$@" "-Xms$SPARK_EXECUTOR_MEMORY" "-Xmx$SPARK_EXECUTOR_MEMORY" -cp "${SPARK_CLASSPATH:-}:$home/jars/*" \
      org.apache.spark.scheduler.cluster.k8s.KubernetesExecutorBackend \
      --driver-url "$SPARK_DRIVER_URL" --executor-id "$SPARK_EXECUTOR_ID" --cores "$SPARK_EXECUTOR_CORES" \
      --app-id "$SPARK_APPLICATION_ID" --hostname "$SPARK_EXECUTOR_POD_IP" \
      --resourceProfileId "$SPARK_RESOURCE_PROFILE_ID" --podName "$SPARK_EXECUTOR_POD_NAME"
    ;;
  *)
    exec /opt/rota/bin/rota pipeline "$@"
    ;;
esac
