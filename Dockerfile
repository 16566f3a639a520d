# One file, three images: operator, sidecar, pipeline (docker build --target operator .).
ARG BASE=python:3.13-slim-trixie
ARG UV=ghcr.io/astral-sh/uv:0.13.8

FROM ${UV} AS uv

# Everything is installed into /opt/rota, with the interpreter that the final images have too.
FROM ${BASE} AS build
COPY --from=uv /uv /usr/local/bin/uv
ENV UV_COMPILE_BYTECODE=1 UV_LINK_MODE=copy UV_NO_CACHE=1 UV_PYTHON_DOWNLOADS=0 \
    UV_PROJECT_ENVIRONMENT=/opt/rota UV_SYSTEM_CERTS=1
# The same sources give the same bytes: no times in compiled files, and none in notes of uv's own.
ENV PYC_INVALIDATION_MODE=UNCHECKED_HASH UV_NO_INSTALLER_METADATA=1
RUN uv venv --python /usr/local/bin/python3 /opt/rota
WORKDIR /src

# Dependencies come before the source: they change rarely, and their layer is the big one.
FROM build AS operator-dependencies
COPY pyproject.toml uv.lock ./
# A sixth of it would be the tests that packages bring, numpy's above all.
RUN uv sync --frozen --no-dev --no-install-workspace --extra operator --extra traces --extra bucket \
    && find /opt/rota -type d -name tests -prune -exec rm -r {} +

FROM build AS sidecar-dependencies
COPY pyproject.toml uv.lock ./
RUN uv sync --frozen --no-dev --no-install-workspace --extra sidecar --extra traces \
    && find /opt/rota -type d -name tests -prune -exec rm -r {} +

FROM build AS pipeline-dependencies
COPY pyproject.toml uv.lock ./
RUN uv sync --frozen --no-dev --no-install-workspace --extra pipeline \
    && find /opt/rota -type d -name tests -prune -exec rm -r {} +
# Among Spark's own jars, those for lakes in S3: executors have them, too. Another Maven repository: --build-arg.
ARG ROTA_MAVEN_URL=
COPY operator/rota/pipeline/common/s3_jars.py operator/rota/pipeline/common/s3_jars.txt ./
RUN /opt/rota/bin/python s3_jars.py "$(echo /opt/rota/lib/python3*/site-packages/pyspark/jars)"

# Rota itself, apart, so that a change of source is a small layer.
FROM build AS source
COPY . .
RUN uv build --wheel --out-dir /dist \
    && uv pip install --offline --no-deps --python /opt/rota --prefix /rota /dist/*.whl

# The sidecar's hot modules, compiled. Debian's Python needs its headers, too; python's own images have them.
FROM build AS compiled
ARG PYTHON_HEADERS=
RUN has_compiler() { \
        headers=$(/opt/rota/bin/python -c 'import sysconfig; print(sysconfig.get_path("include"))'); \
        echo '#include <Python.h>' | gcc "-I$headers" -fsyntax-only -x c -; \
    }; \
    has_compiler 2> /dev/null \
    || { apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev ${PYTHON_HEADERS}; }; \
    has_compiler \
    || { echo "The image BASE needs gcc and Python's C headers, or apt-get to install them: docs/platform.md" >&2; exit 1; }
COPY pyproject.toml uv.lock ./
RUN UV_PROJECT_ENVIRONMENT=/opt/compile \
    uv sync --frozen --no-dev --no-install-workspace --extra sidecar --extra traces --group compile
COPY operator operator
COPY docker/compile_sidecar.py docker/compiled_modules.txt docker/
RUN PYTHONHASHSEED=0 /opt/compile/bin/python docker/compile_sidecar.py operator /compiled \
    && mkdir -p "/rota$(echo /opt/rota/lib/python3*/site-packages | sed s,/opt/rota,,)" \
    && cp -r /compiled/. /rota/lib/python3*/site-packages/

FROM ${BASE} AS final
ARG VERSION=0.1.0
LABEL org.opencontainers.image.title="Rota" \
      org.opencontainers.image.description="Fleets of message-queue consumers on Kubernetes" \
      org.opencontainers.image.source="https://github.com/rota-dev/rota" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}"
ENV PATH=/opt/rota/bin:/usr/local/bin:/usr/bin:/bin PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
WORKDIR /

# Each image names its commit in its last layer: another commit builds no other layer anew.
FROM final AS operator
COPY --from=operator-dependencies /opt/rota /opt/rota
COPY --from=source /rota /opt/rota
ARG REVISION=unknown
ARG CREATED=1970-01-01T00:00:00Z
LABEL org.opencontainers.image.revision="${REVISION}" org.opencontainers.image.created="${CREATED}"
USER 65532:65532
ENTRYPOINT ["/opt/rota/bin/rota", "operator"]

FROM final AS sidecar
COPY --from=sidecar-dependencies /opt/rota /opt/rota
COPY --from=source /rota /opt/rota
COPY --from=compiled /rota /opt/rota
ARG REVISION=unknown
ARG CREATED=1970-01-01T00:00:00Z
LABEL org.opencontainers.image.revision="${REVISION}" org.opencontainers.image.created="${CREATED}"
USER 65532:65532
ENTRYPOINT ["/opt/rota/bin/python", "-m", "rota.sidecar"]

FROM final AS pipeline
# Java's package links its manual pages and breaks off where slim images have no folder for them.
RUN mkdir -p /usr/share/man/man1 \
    && apt-get update \
    && apt-get install --yes --no-install-recommends default-jre-headless \
    && rm -rf /var/lib/apt/lists/* \
    && echo 'rota:x:65532:65532::/tmp:/usr/sbin/nologin' >> /etc/passwd
# Hadoop, which Spark stands on, will not work for a user without a name.
COPY --from=pipeline-dependencies /opt/rota /opt/rota
COPY --from=source /rota /opt/rota
COPY docker/spark.sh /opt/rota/bin/spark.sh
ARG REVISION=unknown
ARG CREATED=1970-01-01T00:00:00Z
LABEL org.opencontainers.image.revision="${REVISION}" org.opencontainers.image.created="${CREATED}"
USER 65532:65532
ENTRYPOINT ["/opt/rota/bin/spark.sh"]
