"""The numbers that two strangers must agree on, bit for bit: encoding, combining, hashing and the outer step.

Everything here is a pure function of its arguments: no IO, no clock, no randomness. numpy, numba and blake3 are
all it needs; torch is imported by `vector` and `codec.device` alone. `README.md` says what is pinned.
"""
