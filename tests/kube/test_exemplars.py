"""Exemplars: a real Prometheus stores them, and each names a trace that was exported."""

import asyncio
import os
from collections.abc import AsyncIterator

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from ground.cluster import Cluster
from ground.instance import Instance
from ground.poll import soon
from ground.prometheus import Prometheus
from kube.in_process_operator import Operator
from kube.world import OperatedNamespace, add_two_members
from otlp_receiver import Receiver, a_receiver
from rota.brokers.memory import MemoryCluster
from rota.kube.http.operator_probes import metrics_route
from rota.kube.telemetry.trace_export import TraceExporter, open_recorder

pytestmark = pytest.mark.usefixtures("crds", "node")


@pytest.fixture
async def received(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Receiver]:
    """Run a receiver of traces."""
    async with a_receiver() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        yield receiver


@pytest.fixture
async def operator(
    control_plane: Cluster, namespace: str, memory: MemoryCluster, received: Receiver
) -> AsyncIterator[Operator]:
    """Run an operator that exports traces to the receiver."""
    assert received.got.empty()
    traces = TraceExporter(open_recorder(os.environ, "a-test", "0"))
    async with Operator(control_plane.kubeconfig, namespace, memory, traces=traces) as leading:
        yield leading
    await traces.close()


async def test_metrics_exemplars_in_prometheus_name_exported_traces(
    world: OperatedNamespace, instance: Instance, received: Receiver
) -> None:
    app = web.Application()
    app.add_routes([metrics_route(world.operator.metrics, world.operator.read_model)])
    async with TestServer(app) as server:
        prometheus = Prometheus(instance, [f"127.0.0.1:{server.port}"])
        await asyncio.to_thread(prometheus.up)
        try:
            await add_two_members(world)

            async def stored() -> set[str]:
                all_series = await asyncio.to_thread(
                    prometheus.exemplars, "rota_rebalance_duration_seconds_bucket", 600
                )
                return {exemplar["labels"]["trace_id"] for series in all_series for exemplar in series["exemplars"]}

            ids = await soon(stored)

            sent: set[str] = set()
            while not ids <= sent:
                sent |= {span.trace_id.hex() for span in await received.spans()}
        finally:
            await asyncio.to_thread(prometheus.down)
