"""Stage `report`."""
