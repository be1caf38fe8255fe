"""What the public flags make."""

import argparse

import pytest

from llm_ingress.flags import add_public_flags, add_session_ttl_flag, gateway_config


@pytest.mark.parametrize(
    ("flags", "n_slots", "n_lanes", "n_decodes"),
    [
        ("", 0, 64, 32),
        ("", 8, 64, 32),
        ("", 100, 200, 100),
        ("--ring-streams 10 --max-in-flight-decodes 5", 100, 10, 5),
    ],
)
def test_no_slot_stays_empty_for_a_limit_that_nobody_set(
    flags: str, n_slots: int, n_lanes: int, n_decodes: int
) -> None:
    parser = argparse.ArgumentParser()
    add_public_flags(parser)
    add_session_ttl_flag(parser)
    config = gateway_config(parser.parse_args(flags.split()), n_slots=n_slots)
    assert (config.ring_streams, config.budgets.max_in_flight_decodes) == (n_lanes, n_decodes)
