"""What the operator decides: admits nodes, leads rounds, keeps the ledger, shows the run. Touches no weights.

`rounds` is the deciding code and `leading` its shell; everything else here is the edge of one process, wired in `app`.
"""
