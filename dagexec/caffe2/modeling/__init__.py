"""What models are made of besides nets: initializers of parameters, and what is known of a parameter."""
