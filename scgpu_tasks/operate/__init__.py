"""What somebody needs who runs the flows as a service: see deployments/README.md."""
