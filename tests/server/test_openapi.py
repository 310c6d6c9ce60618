"""The served OpenAPI document, and what schemathesis finds when it makes requests from it."""

from __future__ import annotations

import json

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis.checks import not_a_server_error
from server.serving import Serving, scripted_model

from coli.server.openapi import document
from coli.server.schemas import ChatRequest, CompletionRequest

schema = schemathesis.openapi.from_dict(document())


@pytest.fixture(scope="module")
def url():
    """A small server whose answers are short, so that a request without a limit is quick."""
    with Serving(scripted_model(lambda ids: ord("o") if len(ids) % 9 else 258, context=256)) as client:
        yield f"http://127.0.0.1:{client.port}"


def test_document_names_every_field_that_is_read(demo):
    """What is served is made of the structs that requests are checked against."""
    served = demo.get("/openapi.json").json
    assert served == json.loads(json.dumps(document()))
    assert "404" in served["paths"]["/v1/models/{model}"]["get"]["responses"]
    for kind in (ChatRequest, CompletionRequest):
        properties = served["components"]["schemas"][kind.__name__]["properties"]
        assert set(properties) == set(kind.__struct_fields__)


def check(case, url):
    case.call_and_validate(base_url=url, checks=[not_a_server_error], timeout=30)


@schema.parametrize()
@settings(
    max_examples=15, deadline=None, phases=[Phase.explicit, Phase.generate], suppress_health_check=list(HealthCheck)
)
def test_generated_requests_cause_no_server_error(case, url):
    """No request that the document allows, and none that it does not, is answered 5xx."""
    check(case, url)


@pytest.mark.full
@schema.parametrize()
@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
def test_many_generated_requests_cause_no_server_error(case, url):
    """The same, more of them."""
    check(case, url)
