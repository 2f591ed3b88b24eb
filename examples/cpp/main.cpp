// Server of key_door.h over proto/starpod/v1/environment.proto, as described in docs/protocol.md.
#include <grpcpp/ext/proto_server_reflection_plugin.h>

#include <csignal>
#include <iostream>

#include "service.h"

int main(int argc, char** argv) {
  std::map<std::string, std::string> options{{"--host", "127.0.0.1"}, {"--port", "50051"}};
  for (int i = 1; i < argc; i += 2) {
    if (!options.count(argv[i]) || i + 1 == argc)
      return std::cerr << "usage: key_door_server [--host HOST] [--port PORT]\n", 2;
    options[argv[i]] = argv[i + 1];
  }
  sigset_t stop;  // blocked before other threads start, so that only this thread receives signals
  sigemptyset(&stop);
  for (const int signal : {SIGTERM, SIGINT}) sigaddset(&stop, signal);
  pthread_sigmask(SIG_BLOCK, &stop, nullptr);

  Service service;
  grpc::EnableDefaultHealthCheckService(true);
  grpc::reflection::InitProtoReflectionServerBuilderPlugin();
  grpc::ServerBuilder builder;
  int port = 0;
  builder.AddListeningPort(options["--host"] + ":" + options["--port"], grpc::InsecureServerCredentials(), &port);
  builder.RegisterService(&service);
  builder.SetMaxReceiveMessageSize(static_cast<int>(about.limits().max_message_bytes()));
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);  // fail if the port is in use
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, 5000);  // clients send pings
  const auto server = builder.BuildAndStart();
  if (!server || !port) return 1;
  server->GetHealthCheckService()->SetServingStatus(spec.id(), true);
  std::cout << "Serving " << spec.id() << " on " << options["--host"] << ":" << port << std::endl;

  const timespec tick{0, 100'000'000};
  while (sigtimedwait(&stop, nullptr, &tick) < 0) service.reap();
  server->GetHealthCheckService()->SetServingStatus(false);
  service.draining = true;
  const double end = now() + 10;
  while (service.reap() && now() < end && sigtimedwait(&stop, nullptr, &tick) < 0) continue;
  server->Shutdown(std::chrono::system_clock::now() + std::chrono::seconds(1));
}
