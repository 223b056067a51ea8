"""Engines behind a real Prometheus and a real OTLP receiver, and the queries of the dashboard."""

from __future__ import annotations

import json
import shutil
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.support.engines import ServerGroup, free_port
from tests.support.server import Server

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples" / "observability"
DASHBOARD = EXAMPLES / "grafana" / "dashboards" / "kvferry.json"
PROMETHEUS = shutil.which("prometheus")
VARIABLES = {"$__rate_interval": "30s", "$model": ".*", "$instance": ".*"}


def queries() -> Iterator[tuple[str, str]]:
    """The title of each panel of the dashboard with each of its queries; variables have values that fit all engines."""
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for target in panel.get("targets", ()):
            text = target["expr"]
            for name, value in VARIABLES.items():
                text = text.replace(name, value)
            yield panel["title"], text


class Prometheus:
    """A Prometheus server with the example's configuration, of which the addresses and the interval are replaced."""

    def __init__(self, group: ServerGroup, folder: Path, roles: Mapping[str, Server]) -> None:
        """``roles``: the engines, by the role that the example gives them."""
        assert PROMETHEUS is not None
        text = (EXAMPLES / "prometheus.yml").read_text().replace("scrape_interval: 15s", "scrape_interval: 1s")
        for (role, server), given in zip(roles.items(), ("127.0.0.1:8001", "127.0.0.1:8002"), strict=True):
            assert f'["{given}"]\n        labels: {{role: {role}}}' in text
            text = text.replace(given, f"{server.host}:{server.port}")
        shutil.copy(EXAMPLES / "alerts.yml", folder)
        config, port = folder / "prometheus.yml", free_port()
        config.write_text(text)
        command = [PROMETHEUS, f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}"]
        self.server = group.spawn(
            "prometheus", [*command, f"--web.listen-address=127.0.0.1:{port}"], host="127.0.0.1", port=port
        )

    def ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.server.url}/-/ready", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def query(self, text: str) -> list[dict[str, Any]]:
        """The result of an instant query. Raises HTTPError where Prometheus refuses it."""
        form = urllib.parse.urlencode({"query": text})
        with urllib.request.urlopen(f"{self.server.url}/api/v1/query?{form}", timeout=30) as answer:
            found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
            return found

    def value(self, text: str) -> float:
        """The sum of the result of an instant query; -1 without any."""
        found = [float(each["value"][1]) for each in self.query(text)]
        return sum(found) if found else -1.0
