"""Part `push`: CPU of a gateway worker per delivery over TLS, beside bare TLS writes of the same bytes."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from qim.app.bench.child import Child
from qim.app.bench.figures import Figure, PartReport
from qim.app.bench.push_driver import PAYLOAD_BYTES, Block, Drive, Rounds, drive
from qim.app.bench.push_server import Serve, serve_floor, serve_gateway
from qim.app.tls import ensure_certificates

RECEIVERS: Final = 1000
COALESCED: Final = 4
CENTRIFUGO_US: Final = 10.4
"""Server CPU per TLS delivery, one core, 1,000 subscribers, the same payload, on this kind of box."""
SINGLE_RATIO_MAX: Final = 1.3
COALESCED_RATIO_MAX: Final = 1.0
_START_TIMEOUT_S: Final = 30.0
_CONNECT_TIMEOUT_S: Final = 300.0
_MARGIN_S: Final = 120.0

Progress = Callable[[str], None]


def run_push(seconds: float, progress: Progress, *, receivers: int = RECEIVERS) -> PartReport:
    """Alternating blocks of gateway and floor, first one frame a tick, then several that coalesce."""
    with tempfile.TemporaryDirectory(prefix="qim-bench-", dir="/tmp") as directory:
        run_dir = Path(directory)
        tls = ensure_certificates(run_dir / "tls", "127.0.0.1", time.time_ns() // 1_000_000)
        serve = Serve(run_dir=run_dir, tls=tls, token_key=Ed25519PrivateKey.generate().private_bytes_raw())
        with Child("gateway", serve_gateway) as gateway, Child("floor", serve_floor) as floor:
            gateway_port = gateway.call(serve, _START_TIMEOUT_S)
            floor_port = floor.call(serve, _START_TIMEOUT_S)
            with Child("driver", drive) as driver:
                driver.call(
                    Drive(
                        run_dir=run_dir,
                        ca_path=tls.ca_path,
                        token_key=serve.token_key,
                        gateway_port=gateway_port,
                        gateway_pid=gateway.pid,
                        floor_port=floor_port,
                        floor_pid=floor.pid,
                        receivers=receivers,
                    ),
                    _CONNECT_TIMEOUT_S,
                )
                single = _rounds(driver, 1, seconds, progress)
                coalesced = _rounds(driver, COALESCED, seconds, progress)
    return report_of(single, coalesced, receivers, seconds)


def _rounds(driver: Child, frames: int, seconds: float, progress: Progress) -> list[Block]:
    blocks: list[Block] = driver.call(Rounds(frames=frames, seconds=seconds), seconds + _MARGIN_S)
    gateway_us, floor_us = median_us(blocks)
    progress(f"{frames} frames a tick: gateway {gateway_us:.2f} µs, bare write {floor_us:.2f} µs a frame")
    return blocks


def median_us(blocks: Sequence[Block]) -> tuple[float, float]:
    """(gateway, floor); the gateway's is the floor's times the median ratio of neighbours, so that a drift of the
    machine between blocks cancels."""
    floor_us = statistics.median(block.floor_us for block in blocks)
    return floor_us * statistics.median(block.gateway_us / block.floor_us for block in blocks), floor_us


def report_of(single: Sequence[Block], coalesced: Sequence[Block], receivers: int, seconds: float) -> PartReport:
    """Figures of both kinds of blocks."""
    single_us, floor_us = median_us(single)
    coalesced_us, coalesced_floor_us = median_us(coalesced)
    rival: Mapping[str, Any] = {"beside": "Centrifugo, one core", "beside_value": CENTRIFUGO_US}
    return PartReport(
        part="push",
        conditions=[
            f"{receivers:,} receivers over TLS 1.3, {PAYLOAD_BYTES} byte texts, {seconds:.0f} s a point",
            "one gateway worker alone, fed with PushBatches over its backplane",
            "floor: write_nocheck of the same bytes to as many TLS sockets, alternating blocks on one core",
        ],
        figures=[
            Figure(
                name="single frames", value=single_us, unit="µs/delivery", beside="bare TLS write",
                beside_value=floor_us, at_most=SINGLE_RATIO_MAX, aim_is_ratio=True,
            ),
            Figure(name="  the same", value=single_us, unit="µs/delivery", **rival),
            Figure(
                name=f"{COALESCED} frames a tick", value=coalesced_us, unit="µs/delivery",
                beside="bare TLS write, single", beside_value=floor_us, at_most=COALESCED_RATIO_MAX, aim_is_ratio=True,
            ),
            Figure(
                name="  the same", value=coalesced_us, unit="µs/delivery", beside="bare TLS write of the four joined",
                beside_value=coalesced_floor_us,
            ),
            Figure(name="  the same", value=coalesced_us, unit="µs/delivery", **rival),
        ],
        details={
            "single": [{"gateway_us": block.gateway_us, "floor_us": block.floor_us} for block in single],
            "coalesced": [{"gateway_us": block.gateway_us, "floor_us": block.floor_us} for block in coalesced],
        },
    )  # fmt: skip
