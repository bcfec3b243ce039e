"""Scrapes of the URL of the metrics, read by the parsers of prometheus_client."""

from typing import NamedTuple

from django.test import Client
from prometheus_client.openmetrics import parser as openmetrics_parser
from prometheus_client.parser import text_string_to_metric_families

TOKEN = "a-token-of-the-tests"
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"


class Scrape(NamedTuple):
    content_type: str
    families: dict
    values: dict

    def value(self, name, **labels):
        return self.values[name, tuple(sorted(labels.items()))]

    def labels(self, name, label):
        return {dict(labels)[label] for found, labels in self.values if found == name}


def scrape(accept="text/plain"):
    """Return the metrics that Prometheus would read."""
    response = Client().get(
        "/djqueue/metrics", headers={"authorization": f"Bearer {TOKEN}", "accept": accept}
    )
    assert response.status_code == 200, response.content
    text = response.content.decode()
    is_open = "openmetrics" in response["Content-Type"]
    parse = openmetrics_parser.text_string_to_metric_families if is_open else text_string_to_metric_families
    families = {family.name: family for family in parse(text)}
    samples = [sample for family in families.values() for sample in family.samples]
    values = {(one.name, tuple(sorted(one.labels.items()))): one.value for one in samples}
    assert len(values) == len(samples), "a sample is there twice"
    return Scrape(response["Content-Type"], families, values)


__all__ = ["OPENMETRICS", "TOKEN", "Scrape", "scrape"]
