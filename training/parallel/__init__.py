"""How a training is spread over ranks: strategies, engines, collectives, precision."""
