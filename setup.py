"""Lets tools that only know `setup.py` build tfdist; every setting is in pyproject.toml."""

from __future__ import annotations

from setuptools import setup

setup()
