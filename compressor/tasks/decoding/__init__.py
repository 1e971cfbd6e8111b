"""Scoring by decoding: a text is generated for every validation prompt and compared with its references."""
