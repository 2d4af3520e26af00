"""A mix is a plan, a conversion is a plan: tensor expressions, their coverage check, and their streaming execution."""
