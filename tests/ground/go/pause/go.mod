module rota.dev/ground/pause

go 1.24.0
