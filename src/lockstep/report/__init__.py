"""What a person sees when a run is over: tables as text and curves as a picture. Nothing here prints."""
