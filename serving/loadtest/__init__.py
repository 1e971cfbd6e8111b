"""Load tests of a served model: what is sent, when, and what the clients and the server measure meanwhile."""
