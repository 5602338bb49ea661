"""Choosing a strategy before training: what each would need and how long a step would take."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "hardware": ["Device", "Hardware", "Link", "PRESETS"],
        "plan": ["Plan", "plan"],
        "prediction": ["Prediction"],
    },
)
