"""The metric of an alert on a sidecar whose slot folder never worked."""

from __future__ import annotations

from chaos.conftest import settings
from chaos.raw import until
from slotkeeper.app import running

NOBODY = "http://127.0.0.1:9"


async def test_a_slot_folder_that_never_could_be_used_is_counted(tmp_path):
    (tmp_path / "slots").write_bytes(b"a file, not a folder")
    async with running(settings(NOBODY, slot_dir=tmp_path / "slots")) as sidecar:
        value, labels = sidecar.metrics.registry.get_sample_value, {"op": "open", "outcome": "not_ours"}
        await until(lambda: value("slotkeeper_snapshot_operations_total", labels), "it is counted")
