"""What can be wrong with numbers, one class for each question.

RuntimeError
└── DenormalsError a thread whose floating point would give other numbers than everybody's
ValueError
├── CodecError     bytes that are no canonical frame, or values that no frame can hold
├── LayoutError    parameters and a flat vector that do not fit together
├── RuleError      contributions or weights that a rule cannot combine
└── SpecError      arithmetic settings that contradict each other or are out of range
"""

from __future__ import annotations


class DenormalsError(RuntimeError):
    """A thread that takes denormals for zero: what it computes is not what others compute. No input is at fault."""


class CodecError(ValueError):
    """Bytes that are no canonical frame, or values that no frame can hold."""


class LayoutError(ValueError):
    """Parameters and a flat vector that do not fit together."""


class RuleError(ValueError):
    """Contributions or weights that a rule cannot combine."""


class SpecError(ValueError):
    """Arithmetic settings that contradict each other or are out of range."""
