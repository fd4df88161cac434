"""RFR: sentence pairs mined out of comparable text, its margin baseline, tuning and evaluation."""
