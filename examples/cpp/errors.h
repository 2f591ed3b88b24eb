// Errors are thrown as the gRPC status of a unary call. A Reply on a Stream carries the details of that status.
#pragma once
#include <google/rpc/error_details.pb.h>
#include <google/rpc/status.pb.h>
#include <grpcpp/grpcpp.h>

#include <map>
#include <string>

using google::protobuf::Message;

inline grpc::Status failure(grpc::StatusCode code, const std::string& reason, const std::string& message,
                            std::map<std::string, std::string> metadata = {}, const Message* more = nullptr) {
  google::rpc::ErrorInfo info;
  info.set_domain("starpod.v1");
  info.set_reason(reason);
  metadata.try_emplace("advice", "give_up");
  info.mutable_metadata()->insert(metadata.begin(), metadata.end());
  google::rpc::Status status;
  status.set_code(code);
  status.set_message(message);
  status.add_details()->PackFrom(info);
  if (more) status.add_details()->PackFrom(*more);
  return {code, message, status.SerializeAsString()};
}
inline grpc::Status bad_argument(const std::string& field, const std::string& mend) {
  google::rpc::BadRequest request;
  auto* violation = request.add_field_violations();
  violation->set_field(field.substr(0, 200));  // clients reject long trailers
  violation->set_description(mend);
  return failure(grpc::INVALID_ARGUMENT, "BAD_ARGUMENT", mend, {}, &request);
}
inline grpc::Status unsupported(const std::string& what) {
  return failure(grpc::UNIMPLEMENTED, "UNSUPPORTED", "there is no " + what + " here", {{"capability", what}});
}
