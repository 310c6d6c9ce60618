"""Models of the container that most of these tests use: on the CPU alone, as the reference, and on devices."""

from __future__ import annotations

import pytest
from engine.standins import CONTEXT

import coli


@pytest.fixture(scope="module")
def path(make_container):
    return str(make_container("tiny-random"))


@pytest.fixture(scope="module")
def cpu(path):
    with coli.load(path, devices="none", threads=2, context=CONTEXT) as model:
        yield model


@pytest.fixture
def load(path, tmp_path):
    """load(*devices) -> Model, closed at the end; its heat is its own."""
    models = []

    def made(*devices, **options):
        heat = tmp_path / f"heat{len(models)}.json"
        models.append(coli.load(path, devices=devices, threads=2, context=CONTEXT, heat=heat, **options))
        return models[-1]

    yield made
    for model in models:
        model.close()
