"""Pipeline schedules as plain data: made, checked, replayed and explained."""
