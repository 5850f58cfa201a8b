"""A daemon with managed engines is a house of the flows."""

from tests.flows.conftest import build as build
