"""Everything that yields a number: timers, spans, memory."""
