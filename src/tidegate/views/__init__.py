"""SQL views: checked, compiled to plans, and kept up to date by folding changes into arrangements."""
