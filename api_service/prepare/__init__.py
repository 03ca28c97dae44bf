"""From a checked body to a GenerateRequest: render, tokenize, check limits. Everything refusable is refused here."""
