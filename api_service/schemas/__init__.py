"""Bodies of requests as pydantic models that mirror OpenAI's, and what of them is refused by name."""
