"""The largest of everything that a stranger may send: checked before memory is spent.

A writer is held to the same limits as a reader, so what is refused here never leaves this machine either.
"""

from __future__ import annotations

PROTOCOL = 3
"""Said in Hello and at admission; two that differ don't talk."""

# -- bytes ---------------------------------------------------------------------------------------------------------

MESSAGE_BYTES = 64 * 2**20
"""One encoded message or envelope."""
FRAME_BYTES = MESSAGE_BYTES + 64
"""One frame of a stream, its tag and length included: what gRPC's maximum message length is set to."""
PART_BYTES = 2**20 + 2**14
"""Data of one part of a stream; whatever is longer travels in parts. A chunk of 2^20 values as int8, with the scales of
its blocks of 512 values or more, is one part: a second message for what is left over would cost nearly as much."""
THING_BYTES = 128 * 2**20
"""One chunk, state chunk, result or piece, over all its parts: 2^24 values as fp32 and room for a header."""
RECORD_BYTES = 1024
"""One DHT record with its envelope: it must fit a datagram."""
CERTIFICATE_BYTES = 8192
"""A certificate or a certificate request, DER."""
SPEC_BYTES = 256 * 1024
"""A RunSpec's JSON; equals `runspec.SPEC_BYTES_MAX`."""
ENVELOPE_EXTRA_BYTES = 512
"""What an envelope adds to its body at most."""
ADDRESSES_BYTES = 16 * 1024
"""The signed `Addresses`."""
TOKEN_BYTES = 1024
"""An invite token's envelope."""
SEALED_EXTRA_BYTES = 48
"""What sealing to a key adds: an ephemeral public key and a tag."""
ADMIT_BYTES = 32 * 1024
"""A request for admission with its envelope."""
PROPOSE_BYTES = MESSAGE_BYTES - 8192
"""A proposal: a promise that reports it has to fit a message, too."""
VOTE_BYTES = 1024
"""The envelope of a vote or a genesis."""
ORDER_BYTES = SPEC_BYTES + 4096
"""One order's envelope; the longest carries an amended RunSpec."""
INVITE_CHARS = 8192
"""An invite string."""

# -- counts --------------------------------------------------------------------------------------------------------

MEMBERS = 10_000
"""Members of a run, and whatever there is one of for each member; equals the highest `max_members` of a RunSpec."""
VOTERS = 32
CHUNKS = 2**18
"""Chunks of the flat vector: 2.7e11 parameters at 2^20 values a chunk."""
RANGES = 4096
"""Ranges of batches in one list."""
RETURNED = 2**17
"""Ranges that a commit gives back: some of every member's, where a deadline has cut them all."""
LACKS = 4096
"""Chunks that one claim may call missing."""
ORDERS = 64
"""Orders that one commit carries."""
HASHES = 4096
"""Things that one fetch may ask for."""
COMMITS = 1024
"""Commits that one answer may hold."""
PATH = 32
"""Hashes of one Merkle path."""
ADDRESSES = 16
"""Addresses of one peer, of one kind."""
ITEMS = 2**20
"""Values of all lists of one message together."""
UNKNOWN_FIELDS = 2**16
"""Fields of one message that this version doesn't know and skips."""
UNKNOWN_BYTES = 1024
"""Bytes of a signed message that this version doesn't know: they are passed on with it, so they must not add up."""

# -- values --------------------------------------------------------------------------------------------------------

INTEGER = 2**53
"""The largest integer anywhere: what JSON and fp64 still hold exactly."""
RUN_TIME_S = 1e9
"""Seconds since a run's origin: 31 years."""
TEXT = 1024
"""Characters of a reason or another sentence."""
WORD = 100
"""Characters of a name: of a rule, a codec, a kind, a contributor."""
ADDRESS = 300
"""Characters of one address: a DNS name of 253 and what stands around it."""
PEER_ID = 128
"""Characters of a peer id; an Ed25519 key's has 52."""
NONCE_BYTES = 64
"""A nonce: what is asked for to be given back, or makes a request unique."""
