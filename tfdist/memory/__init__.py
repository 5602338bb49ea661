"""Training what does not fit: which activations a model keeps, where, and what is computed again."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "application": ["apply", "remove"],
        "policy": ["MemoryPolicy"],
        "budget": ["Choice", "MemoryReport", "choose", "report"],
    },
)
