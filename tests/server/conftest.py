"""The servers that many tests share: the demo model, and models with a script for one test."""

from __future__ import annotations

import pytest
from server.serving import Serving, scripted_model

import coli


@pytest.fixture(scope="session")
def demo_model():
    with coli.load("demo", threads=1, devices="none") as model:
        yield model


@pytest.fixture(scope="session")
def demo():
    """A client of a server with the demo model."""
    with Serving(lambda: coli.load("demo", threads=1, devices="none")) as client:
        yield client


@pytest.fixture
def serve():
    """serve(script, **options of the engine) -> a client of a server that follows the script; ended with the test."""
    running = []

    def start(script, *, app=None, folder=None, **options):
        kinds = ("slots", "queue", "prefix_bytes", "prefix_every")
        of_service = {name: options.pop(name) for name in kinds if name in options}
        model = scripted_model(script, **({"folder": folder} if folder else {}), **options)
        serving = Serving(model, app=app, **of_service)
        running.append(serving)
        client = serving.start()
        client.serving, client.engine = serving, model.engine
        return client

    yield start
    for serving in running:
        serving.stop()
