# SPDX-License-Identifier: Apache-2.0
"""Images in one pass: `POST /v1/images/surprise` and `proofs`; not of OpenAI's API."""

import time
from typing import Any

import fastapi

from sparse_lavida_jax.data import files, image_files
from sparse_lavida_jax.inference.proofs import Proof
from sparse_lavida_jax.inference.surprise import Surprise
from sparse_lavida_jax.server.batching import Ticket
from sparse_lavida_jax.server.openai import asking, bodies, http_errors
from sparse_lavida_jax.server.openai.bodies import ProofBody, SurpriseBody
from sparse_lavida_jax.server.serving import PROOF, SURPRISE

router = fastapi.APIRouter()


@router.post("/v1/images/surprise")
async def surprise(request: fastapi.Request):
    """Measures in bits how well captions fit an image, the best first."""
    client = asking.Client(request)
    fields, sent = await client.form()
    images = sent.pop("image", [])
    if len(images) != 1 or any(sent.values()):
        sentence = "image: send one file named image, and captions, one a line."
        raise http_errors.Refused(sentence, "image")
    asked = bodies.checked(fields, SurpriseBody)
    captions = [line.strip() for line in files.lines(asked.captions) if line.strip()]

    def decode() -> tuple[Any, dict[str, Any]]:
        return client.service.small(image_files.read_bytes(images[0], check=client.check)), {}

    waiting = await asking.queued(client, SURPRISE, asked, captions, images, decode)
    found: Surprise = await waiting.ended()
    said = found.as_json()
    pairs = zip(found.ranked, said["captions"], strict=True)
    said["captions"] = [{"index": index, **one} for index, one in pairs]
    return {"created": int(time.time()), **said, "sparse_lavida": _notes(waiting.ticket, found)}


@router.post("/v1/images/proofs")
async def prove(request: fastapi.Request):
    """Says whether an image that `sparse-lavida` drew follows from its record."""
    client = asking.Client(request)
    fields, images = await client.recorded_image()
    asked = bodies.checked(fields, ProofBody)

    def decode() -> tuple[Any, dict[str, Any]]:
        source, record = client.record_of(*images)
        pixels = image_files.read_bytes(images[0], check=client.check)
        return source, {"record": record, "pixels": pixels}

    waiting = await asking.queued(client, PROOF, asked, "", images, decode)
    proof: Proof = await waiting.ended()
    said = proof.as_json() | {"lines": proof.lines, "passes": len(proof.stages)}
    return {"created": int(time.time()), **said, "sparse_lavida": _notes(waiting.ticket, proof)}


def _notes(ticket: Ticket, found: Surprise | Proof) -> dict[str, Any]:
    return {
        "warnings": [one.warning for one in ticket.requests if one.warning],
        "seconds": round(ticket.seconds, 4),
        "tokens_passed": found.tokens_passed,
        "batch": ticket.batch,
    }
