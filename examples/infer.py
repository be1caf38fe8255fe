#!/usr/bin/env python3
"""Asks one question of a conversation that the server keeps, and prints the answer as it comes.

    python examples/infer.py "What is the capital of France?" 100

    URL              the server                                      http://127.0.0.1:8080
    MODEL            a model id                                      the first of /v1/models
    CONVERSATION_ID  a UUID: give it again to go on with that        a new one

Needs nothing but Python. Exit status: 0 if the answer is complete, 1 if not.
"""

import json
import os
import sys
import uuid
from collections.abc import Iterator
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

URL = os.environ.get("URL", "http://127.0.0.1:8080").rstrip("/")
MAX_TOKENS = 64
TIMEOUT_S = 600.0


def main(arguments: list[str]) -> int:
    """Return the exit status."""
    if not 1 <= len(arguments) <= 2:
        print(f"usage: {sys.argv[0]} PROMPT [MAX_TOKENS]", file=sys.stderr)
        return 1
    try:
        body = {
            "conversation_id": os.environ.get("CONVERSATION_ID") or str(uuid.uuid4()),
            "prompt": arguments[0],
            "model": os.environ.get("MODEL") or first_model(),
            "max_tokens": int(arguments[1]) if len(arguments) > 1 else MAX_TOKENS,
        }
        return show(events(body), str(body["conversation_id"]))
    except HTTPError as error:
        print(f"{error.code}: {error.read().decode()}", file=sys.stderr)
    except (OSError, HTTPException, ValueError, IndexError) as error:
        print(f"{URL}: {error}", file=sys.stderr)
    return 1


def first_model() -> str:
    """The model that the server names first."""
    with urlopen(f"{URL}/v1/models", timeout=TIMEOUT_S) as answer:
        return str(json.load(answer)["data"][0]["id"])


def events(body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The answer's events, as they come."""
    headers = {"content-type": "application/json"}
    request = Request(f"{URL}/coordinator/infer", json.dumps(body).encode(), headers)
    with urlopen(request, timeout=TIMEOUT_S) as answer:
        for line in answer:
            if line.startswith(b"data: "):
                yield json.loads(line.removeprefix(b"data: "))


def show(answer: Iterator[dict[str, Any]], conversation_id: str) -> int:
    """Print the tokens, and on standard error what the last event says; return the exit status."""
    for event in answer:
        if "token" in event:
            print(event["token"], end="", flush=True)
        elif "usage" in event:
            n_tokens = event["usage"]["completion_tokens"]
            print(flush=True)
            print(f"[{n_tokens} tokens, {event['finish_reason']}, {conversation_id}]", file=sys.stderr)
            return 0
        else:
            print(f"\n{event}", file=sys.stderr)
            return 1
    print("\nthe answer was cut off", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
