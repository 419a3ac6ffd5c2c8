"""Which request is served next, by which replica, decided as a machine does and carried out by the dispatcher."""
