"""The paths of the gRPC methods, for handlers and callers that give and take bytes.

Bytes in, bytes out: gRPC's own deserialisers would parse a frame before anything about it is checked.
"""

from __future__ import annotations

LEADER = "barnraise.v1.Leader"
LEADER_LINE = f"/{LEADER}/Line"

EXCHANGE = "barnraise.v1.Exchange"
EXCHANGE_SEND = f"/{EXCHANGE}/Send"
EXCHANGE_FETCH_THINGS = f"/{EXCHANGE}/FetchThings"

STATE = "barnraise.v1.State"
STATE_OFFER = f"/{STATE}/Offer"
STATE_COMMITS = f"/{STATE}/Commits"
STATE_PING = f"/{STATE}/Ping"
