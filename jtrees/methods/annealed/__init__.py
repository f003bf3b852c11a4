"""GET and RADDT: trees under soft routings of increasing sharpness."""
